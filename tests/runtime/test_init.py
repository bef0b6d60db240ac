"""`kf.init` and `kf.env` on the engine that needs the least time to start."""

import pytest

from tests.launch import programs

pytestmark = pytest.mark.timeout(60)


def tell(body: str, **variables: str) -> list[str]:
    program = "import keras_flow as kf\n" + body
    code, out, err = programs.finish(programs.start(["-c", program], "jax", **variables))
    assert code == 0, err
    return out.splitlines()


def test_devices_must_be_a_number_and_agree_with_the_launcher() -> None:
    body = """
for devices in (0, -1, 2.0, True, 5):
    try: kf.init(devices)
    except kf.FlowError as error: print(error)
print(kf.init().size, kf.init(3).size)
"""
    *wrong, disagree, size = tell(body, KERAS_FLOW_DEVICES="3")
    assert [text.split(";")[0] for text in wrong] == [f"kf.init was given devices={n}" for n in (0, -1, 2.0, True)]
    assert "asked for 5 ranks inside a job of 3" in disagree
    assert size == "3 3"


def test_env_where_one_process_drives_all_ranks() -> None:
    body = """
kf.init(4)
env = kf.env
print(env.get_world_size(), env.local_ranks(), env.process_index(), env.process_count())
print(env.get_node_size(), env.is_main_process())
for ask in (env.get_rank, env.get_local_rank):
    try: ask()
    except kf.FlowError as error: print(error)
"""
    ranks, rest, *errors = tell(body)
    assert (ranks, rest) == ("4 (0, 1, 2, 3) 0 1", "1 True")
    assert len(errors) == 2
    assert all("Use kf.env.local_ranks()" in text and "kf.env.is_main_process()" in text for text in errors)


def test_env_with_one_rank() -> None:
    assert tell("kf.init(1)\nprint(kf.env.get_rank(), kf.env.get_local_rank(), kf.env.get_node_size())") == ["0 0 1"]


def test_unknown_type() -> None:
    body = "try: kf.init(2, 'npu')\nexcept kf.FlowError as error: print(error)"
    assert "npu" in tell(body)[0]


def test_processes_compare_where_their_draws_come_from() -> None:
    body = "from keras_flow.runtime import init\nprint(init._facts()['KERAS_FLOW_RANDOM'])"
    assert [tell(body), tell(body, KERAS_FLOW_RANDOM="stock")] == [["logical"], ["stock"]]
