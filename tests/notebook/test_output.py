"""Output of several ranks as one text."""

from __future__ import annotations

from keras_flow.notebook.output import displays, folded, label, labelled, settled


def test_equal_lines_are_shown_once_and_others_by_rank() -> None:
    texts = {rank: f"ready\nI am {rank}\n" for rank in range(3)}
    assert folded(texts) == ["[ranks 0-2] ready", "[rank 0] I am 0", "[rank 1] I am 1", "[rank 2] I am 2"]


def test_times_of_a_progress_bar_and_addresses_do_not_count() -> None:
    bar = "Epoch 1/2\n\r\x1b[1m1/8\x1b[0m ━━━━\r\x1b[1m8/8\x1b[0m ━━━━ {}\n<Dense at 0x{}>\n"
    texts = {0: bar.format("0s 3ms/step - loss: 1.5", "7fa0"), 1: bar.format("1s 12ms/step - loss: 1.5", "7fb1")}
    assert folded(texts) == [
        "[ranks 0-1] Epoch 1/2",
        "[ranks 0-1] \x1b[1m8/8\x1b[0m ━━━━ 0s 3ms/step - loss: 1.5",
        "[ranks 0-1] <Dense at 0x7fa0>",
    ]


def test_other_numbers_count() -> None:
    assert folded({0: "loss: 1.5\n", 1: "loss: 1.6\n"}) == ["[rank 0] loss: 1.5", "[rank 1] loss: 1.6"]


def test_ranks_that_wrote_more_are_shown_whole() -> None:
    assert folded({0: "a\nb\n", 1: "a\n", 2: "a\n", 3: ""}) == ["[rank 0] a", "[rank 0] b", "[ranks 1-2] a"]


def test_a_line_that_is_written_over_shows_its_last_state() -> None:
    assert settled("1/2\r\r2/2\b\n\nend") == ["2/2", "", "end"]


def test_live_output_marks_lines_and_states() -> None:
    assert labelled("a\nb", "rank 0", at_start=True) == "[rank 0] a\n[rank 0] b"
    assert labelled("c\n", "rank 0", at_start=False) == "c\n"
    assert labelled("\r2/8", "rank 3", at_start=False) == "\r[rank 3] 2/8"


def test_ranks_in_words() -> None:
    assert [label(ranks) for ranks in ([5], [0, 1], [3, 1, 0], [0, 2, 4])] == [
        "rank 5",
        "ranks 0-1",
        "ranks 0-1, 3",
        "ranks 0, 2, 4",
    ]


def test_equal_pictures_are_shown_once() -> None:
    one, other = {"data": {"text/html": "<b>1</b>"}}, {"data": {"text/html": "<b>2</b>"}}
    assert displays({0: [one], 1: [one], 2: [other]}) == [([0, 1], one), ([2], other)]
