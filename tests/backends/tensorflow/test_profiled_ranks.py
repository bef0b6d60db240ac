"""Which rank an event of TensorFlow's profile belongs to."""

from __future__ import annotations

from keras_flow.backends.tensorflow.profiled_ranks import Causes, Event

#: threads that start programs, and threads that run them, of ranks 0 and 1
STARTERS, RUNNERS = (
    ("parallel_device_execute/a", "parallel_device_execute/b"),
    ("eager_async_executor/c", "eager_async_executor/d"),
)


def program(rank: int, number: int, start: float, run: float) -> list[Event]:
    """A program is started and runs on a rank; it leaves work for a thread of all ranks, at its end plus 1."""
    sends = [Event(STARTERS[1], "_Send input 0 from /job:x/device:CPU:1 to /job:x/device:CPU:0", start, 0.1, {})]
    cause = 10 * number + rank
    return [
        Event(STARTERS[rank], "EagerExecute", start, 50.0, {"eager_op": f"f{number}", "is_func": 1}),
        *(sends if rank == 1 else []),
        Event(RUNNERS[rank], "EagerKernelExecute", run, 5.0, {}),
        Event(RUNNERS[rank], "FunctionRun", run + 1, 1.0, {"_pt": 2, "_p": cause}),
        Event("tf_Compute/e", "ExecutorState::Process", run + 10, 2.0, {"_ct": 2, "_c": cause}),
        Event("tf_Compute/e", f"MatMul {number} of {rank}", run + 11, 0.5, {}),
    ]


def devices(*programs: list[Event]) -> dict[str, int | None]:
    events = [event for found in programs for event in found]
    causes = Causes(events)
    return {event.name: causes.device_of(event) for event in events if event.name.startswith("MatMul")}


def test_a_thread_that_ran_before_a_start_was_not_started_by_it() -> None:
    """Rank 0 is quick at first, rank 1 afterwards; the starts of each alone would fit both."""
    found = devices(
        program(0, 1, 0.0, 10.0), program(1, 1, 20.0, 30.0), program(1, 2, 100.0, 110.0), program(0, 2, 115.0, 140.0)
    )
    assert found == {"MatMul 1 of 0": 0, "MatMul 1 of 1": 1, "MatMul 2 of 0": 0, "MatMul 2 of 1": 1}


def test_a_run_knows_its_program_and_its_start() -> None:
    events = [
        *program(0, 1, 0.0, 10.0),
        *program(1, 1, 20.0, 30.0),
        *program(0, 2, 100.0, 110.0),
        *program(1, 2, 120.0, 130.0),
    ]
    causes = Causes(events)
    (event,) = (event for event in events if event.name == "MatMul 2 of 1")
    run = causes.run_of(event)
    assert run is not None
    assert (run.device, run.program, run.start.begin) == (1, "f2", 120.0)


def test_what_no_program_caused_belongs_to_no_rank() -> None:
    lonely = Event("tf_Compute/e", "MatMul alone", 500.0, 1.0, {"_ct": 2, "_c": 99})
    assert devices(program(0, 1, 0.0, 10.0), program(1, 1, 20.0, 30.0), [lonely])["MatMul alone"] is None


def test_threads_that_say_no_device_belong_to_no_rank() -> None:
    silent = [event for event in program(1, 1, 20.0, 30.0) if not event.name.startswith("_Send")]
    found = devices(program(0, 1, 0.0, 10.0), silent)
    assert found == {"MatMul 1 of 0": None, "MatMul 1 of 1": None}
