"""The schedule of a pipeline: by its name, as a value, or from a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keras_flow import schedules
from keras_flow.backends.active import backend
from keras_flow.errors import FlowError
from keras_flow.units import counted

_TABLES = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zb1p": schedules.zb1p,
    "zbv": schedules.zbv,
}
#: what `schedule=` may name
NAMES = (*_TABLES, "auto")


def costs(forward: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
    """Times of F, I and W on this engine, where a backward pass takes twice a forward pass.

    Args:
        forward: those of F, of each stage.
    """
    same, none = list(forward), [0.0 for _ in forward]
    return (same, same, same) if backend().capabilities.splits_backward_pass else (same, [2 * f for f in same], none)


def schedule_of(
    given: str | Path | schedules.Schedule,
    ranks: int,
    stages: int | Sequence[Sequence[str]] | None,
    microbatches: int | None,
    chunks: int | None,
) -> schedules.Schedule:
    """The schedule that a user asks for, with as many stages as there are."""
    count = None if stages is None else stages if isinstance(stages, int) else len(stages)
    if isinstance(given, str) and given in _TABLES:
        of_rank = chunks or (2 if given in ("zbv", "interleaved") else 1)
        if count is not None and count != ranks * of_rank:
            if chunks is not None or count % ranks:
                raise FlowError(
                    f"{count} stages on {counted(ranks, 'rank')}: schedule={given!r} gives each rank "
                    f"{of_rank}, which makes {ranks * of_rank} stages. Take stages={ranks * of_rank}, or a placement "
                    f"whose number of ranks divides {count}"
                )
            of_rank = count // ranks
        parts = microbatches or 2 * ranks * of_rank
        if given in ("gpipe", "1f1b", "zbv"):
            fits = of_rank == (2 if given == "zbv" else 1)
            if not fits:
                raise FlowError(
                    f"schedule={given!r} gives each rank {'two stages' if given == 'zbv' else 'one stage'}, not "
                    f'{of_rank}; take stages={ranks * (2 if given == "zbv" else 1)}, or schedule="interleaved"'
                )
            made = _TABLES[given](ranks, parts)
        else:
            made = _TABLES[given](ranks, parts, of_rank)  # type: ignore[call-arg]
    elif given == "auto":
        most = chunks or max(1, (count or ranks) // ranks)
        forward, inputs, weights = (time for (time,) in costs([1.0]))
        made = schedules.auto(ranks, microbatches or 2 * ranks, (forward, inputs, weights), chunks=most)
        if count not in (None, made.stages):
            raise FlowError(
                f'schedule="auto" found {made!r} the shortest of those with up to {most} '
                f"stage{'s' if most > 1 else ''} on each of {ranks} ranks, and stages= says {count}. Say chunks={most} "
                "and leave stages= out, or name a schedule"
            )
    elif isinstance(given, schedules.Schedule):
        made = given
    elif isinstance(given, str | Path) and str(given).endswith(".csv"):
        made = schedules.from_csv(Path(given))
    else:
        raise FlowError(
            f"schedule={given!r} is none of {', '.join(map(repr, NAMES))}, no kf.schedules.Schedule and no .csv file"
        )
    if made.ranks != ranks:
        raise FlowError(f"the schedule is for {made.ranks} ranks, the placement has {ranks}")
    if count is not None and count != made.stages:
        raise FlowError(f"the schedule has {made.stages} stages, stages= says {count}")
    if microbatches is not None and microbatches != made.microbatches:
        raise FlowError(f"the schedule is for {made.microbatches} micro-batches, microbatches={microbatches}")
    return made
