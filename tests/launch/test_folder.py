"""The folder of a job: what an attempt that failed has left in it is gone when the next one begins."""

from pathlib import Path

from keras_flow.launch.folder import JobFolder


def test_an_attempt_finds_nothing_of_the_one_before(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    for path in (folder.asks_for_time, folder.asked(0), folder.saved(1), folder.payload):
        path.touch()
    folder.clear()
    assert [path for path in tmp_path.iterdir()] == [folder.payload]
