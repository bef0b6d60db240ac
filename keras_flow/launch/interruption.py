"""The message of a launcher whose job was asked to end: what was saved, or why nothing was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from keras_flow import settings
from keras_flow.launch import failure
from keras_flow.launch.folder import JobFolder
from keras_flow.launch.job import Job
from keras_flow.launch.processes import RankProcess, Ranks, preemption_seconds
from keras_flow.units import numbered

#: holds for what is written through `atomic`
_WHOLE = "each file is whole, the old one or the new"


def of_a_rank(folder: JobFolder, processes: Sequence[RankProcess]) -> int:
    """The signal by which one rank was asked to end, where it has `kf.on_preemption`; 0 where none was."""
    for process in processes:
        try:
            return int(folder.asked(process.rank).read_text() or 0)
        except FileNotFoundError:
            continue
    return 0


def outcome(head: str, job: Job, folder: JobFolder, ranks: Ranks) -> str:
    """Say in one line how the ranks of this host ended after they were asked to; of one that failed, why.

    Args:
        head: what happened, for example "interrupted".
        job: the job.
        folder: its folder, into which ranks write what they saved.
        ranks: those of this host, none of which runs any more.
    """
    if not folder.asks_for_time.exists():
        return f"{head}; every {job.word} was ended"
    failures = [(process, failure.read(folder, process.rank)) for process in ranks.processes]
    causes = [
        (written.lost_neighbour or written.waited_too_long, written.time, process, written)
        for process, written in failures
        if written is not None and not written.left
    ]
    # one that lost another is no cause where one had to be killed
    if causes and not (min(causes, key=lambda cause: cause[:2])[0] and ranks.unfinished):
        *_, process, written = min(causes, key=lambda cause: cause[:2])
        text = failure.rank_failed(process.rank, job, process.code or written.exit_code, written, "", "")
        return f"{head}; {_WHOLE}. {text}"
    if ranks.unfinished:
        why = "before a second Ctrl-C" if ranks.hurried else f"within {preemption_seconds():g} s"
        hint = "" if ranks.hurried else f" ({settings.GRACE})"
        who = numbered(ranks.unfinished, job.word, job.words)
        return f"{head}; {who} did not finish the callback of kf.on_preemption {why}{hint}; {_WHOLE}"
    missing = [process.rank for process in ranks.processes if not folder.saved(process.rank).exists()]
    if missing:
        return f"{head}; the callback of kf.on_preemption was not called in {numbered(missing, job.word, job.words)}"
    files = {name: None for process in ranks.processes for name in json.loads(folder.saved(process.rank).read_text())}
    if files:
        return f"{head}; {saved_in_words(list(files))}"
    return f"{head}; the callback of kf.on_preemption has ended in every {job.word} of this host"


def saved_in_words(files: Sequence[str]) -> str:
    """Say what was saved before the end, and how the program goes on from there.

    Example:
        >>> saved_in_words(["checkpoints/step-00000012"])
        'saved checkpoints/step-00000012: start the program again, and it goes on from there'
        >>> saved_in_words(["state.keras"])
        "saved state.keras: keras.models.load_model('state.keras') goes on from there"
        >>> saved_in_words(["notes.txt"])
        'saved notes.txt'
    """
    said, last = f"saved {', '.join(files)}", Path(files[-1])
    if last.name.startswith("step-"):  # of kf.callbacks.Checkpoint, which resumes by itself
        return f"{said}: start the program again, and it goes on from there"
    return f"{said}: keras.models.load_model({files[-1]!r}) goes on from there" if last.suffix == ".keras" else said
