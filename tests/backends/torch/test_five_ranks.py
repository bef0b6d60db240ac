"""What ranks do in pairs, on a number of them that is no power of two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import sampling
from tests.ranks import Pool


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool("torch", tmp_path_factory.mktemp("five"), ranks=5)
    yield pool
    pool.close()


@sampling.one_in(2)
def test_small_sums_are_torchs_and_equal_in_every_bit(five: Pool) -> None:
    def program() -> int:
        import torch
        import torch.distributed as dist

        from keras_flow.backends.torch import doubling

        groups = [dist.new_group(list(range(count))) for count in (1, 2, 3, 4)] + [dist.group.WORLD]
        torch.manual_seed(dist.get_rank())
        small = 0
        original = doubling._by_doubling

        def counted(*args) -> None:
            nonlocal small
            small += 1
            original(*args)

        doubling._by_doubling = counted
        try:
            for group in groups:
                if group is dist.GroupMember.NON_GROUP_MEMBER:
                    continue
                for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
                    for shape in ((), (0,), (7,), (3, 5), (40_000,)):
                        value = (8 * torch.randn(shape)).to(dtype)
                        parts = [torch.empty_like(value) for _ in range(group.size())]
                        dist.all_gather(parts, value, group=group)
                        doubling.all_reduce(value, group)
                        wanted = torch.stack(parts).double().sum(0)
                        # gloo's own sums of halves are rounded after each summand, too
                        share = 1e-5 if dtype != torch.bfloat16 else 0.1
                        torch.testing.assert_close(value.double(), wanted, rtol=share, atol=share * 8)
                        results = [torch.empty_like(value) for _ in range(group.size())]
                        dist.all_gather(results, value, group=group)
                        assert all(torch.equal(result, results[0]) for result in results), (group.size(), dtype, shape)
        finally:
            doubling._by_doubling = original
        return small

    # rank 0 is in all five groups: four dtypes, three small shapes of several numbers; of one rank all sizes are small
    assert five(program) == 5 * 4 * 3 + 4


def test_facts_are_merged_by_a_tree(five: Pool) -> None:
    def program() -> list[int]:
        import keras_flow as kf
        from keras_flow.backends.active import backend
        from keras_flow.backends.rendezvous import agreement

        here, count, engine = kf.env.process_index(), kf.env.process_count(), backend()
        original, read = engine.get_text, []

        def counted(key: str, seconds: float) -> str:
            if key.split("/")[2].isdigit() and key not in read:  # asked for again where it is late
                read.append(key)
            return original(key, seconds)

        engine.get_text = counted  # type: ignore[attr-defined]
        try:
            assert agreement.exchange(f"of {here}") == [f"of {index}" for index in range(count)]
        finally:
            engine.get_text = original  # type: ignore[attr-defined]
        reads = agreement.exchange(str(len(read)))
        assert not agreement.differ({"a": 1, "b": [None, "x"], f"of {here}": here}, {0: 3, 1: -3}.get(here, 0))
        for odd in range(count):
            assert agreement.differ({"a": here == odd})
            assert agreement.differ({"a": 1} if here != odd else {"a": 2, "b": 0})
            assert agreement.differ({}, 2**63 if here == odd else 1)
            # stated by one process alone: nobody says otherwise
            assert not agreement.differ({"a": 1} if here == odd else {})
        return [int(text) for text in reads]

    # process 0 reads those of 1, 2 and 4; 2 that of 3; all but 0 the verdict
    assert five(program) == [3, 1, 2, 1, 1]
