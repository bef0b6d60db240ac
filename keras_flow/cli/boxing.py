"""`keras-flow boxing`: prints the plan that changes one layout into another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from keras_flow.cli.options import count
from keras_flow.errors import FlowError

#: links where none are given: latency in s, bandwidth in bytes/s
_INSIDE, _BETWEEN = "10e-6,10e9", "30e-6,1e9"


def boxing(
    source: Annotated[
        str,
        typer.Argument(
            help='Layout before, one sbp for each axis: "S(0)", or "S(0),B" with --hierarchy 2,2.', metavar="FROM"
        ),
    ],
    target: Annotated[str, typer.Argument(help='Layout after: "B", or "B,S(1)".', metavar="TO")],
    shape: Annotated[str, typer.Option(help="Logical shape of the tensor.")] = "4096,4096",
    hierarchy: Annotated[str, typer.Option(help="Ranks along each axis of the placement: 4, or 2,2.")] = "4",
    target_hierarchy: Annotated[
        str, typer.Option(help="Ranks along each axis of the placement after, if it is another one.")
    ] = "",
    ranks: Annotated[str, typer.Option(help="Ranks before, in order; default 0, 1, 2 ...")] = "",
    target_ranks: Annotated[str, typer.Option(help="Ranks after; default as before.")] = "",
    dtype: Annotated[str, typer.Option(help="Element type.")] = "float32",
    ranks_per_host: Annotated[int | None, count("Minimise the time on hosts that have this many ranks each.")] = None,
    inside: Annotated[str | None, typer.Option(help=f"Link in a host: seconds,bytes/s; default: {_INSIDE}.")] = None,
    between: Annotated[str | None, typer.Option(help=f"Its link to others, likewise; default: {_BETWEEN}.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Minimise time on this host, by `keras-flow doctor --bandwidth --json > FILE`.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Whose links of that file count; default: torch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan's JSON form.")] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Print the part of one rank: ranges and partners.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
) -> None:
    """Print how a tensor gets from one layout to another: steps, groups, bytes, lower bound, modelled time.

    Runs without devices and loads no engine. Example:

        keras-flow boxing "S(0),B" "B,S(1)" --shape 4096,4096 --hierarchy 2,4 --png plan.png
    """
    import numpy as np

    from keras_flow.boxing import Topology, plan
    from keras_flow.layout import Layout
    from keras_flow.placements import Placement

    def placement(sizes: str, listed: str) -> Placement:
        lengths = _ints(sizes, "hierarchy")
        if min(lengths) < 1:
            raise FlowError(f"--hierarchy {sizes}: legal are whole numbers of at least 1, for example 4 or 2,2")
        numbers = _ints(listed, "ranks") if listed else list(range(int(np.prod(lengths))))
        if len(numbers) != int(np.prod(lengths)):
            raise FlowError(f"a hierarchy of {lengths} has {int(np.prod(lengths))} ranks, {len(numbers)} are listed")
        return Placement(np.reshape(numbers, lengths))

    def layout(sbp: str, option: str, sizes: str, listed: str) -> Layout:
        axes, parts = len(_ints(sizes, "hierarchy")), 1 + sbp.count(",")
        if axes != parts:
            example = ",".join(["2"] * parts)
            raise FlowError(
                f"{sbp} has {parts} sbp, and --{option} {sizes} has {axes} {'axis' if axes == 1 else 'axes'}: give one "
                f"sbp for each axis, outer axis first, or other axes, for example --{option} {example}"
            )
        return Layout(placement(sizes, listed), sbp, lengths)

    if as_json and rank is not None:
        raise FlowError("--json prints the whole plan, and --rank the part of one rank: give one of them")
    of_hosts = {"--ranks-per-host": ranks_per_host, "--inside": inside, "--between": between}
    given = next((option for option, value in of_hosts.items() if value is not None), None)
    if measured is not None and given:
        raise FlowError(f"--measured has the links of one host, and {given} says others: give one of them")
    if measured is None and backend is not None:
        raise FlowError("--backend chooses among the links of a file: give --measured too")
    for file, ending in ((png, ".png"), (svg, ".svg")):
        _check_file(file, ending)
    # no lengths: a scalar
    lengths = tuple(_ints(shape, "shape")) if shape.strip() else ()
    before = layout(source, "hierarchy", hierarchy, ranks)
    after = layout(
        target,
        "target-hierarchy" if target_hierarchy else "hierarchy",
        target_hierarchy or hierarchy,
        target_ranks or ranks,
    )
    if measured is not None:
        topology = Topology.measured(measured, backend or "torch")
    else:
        topology = Topology(ranks_per_host, _link(inside or _INSIDE, "inside"), _link(between or _BETWEEN, "between"))
    # without links to weigh, the fewest bytes decide
    by_time = measured is not None or ranks_per_host is not None
    result = plan(before, after, dtype, topology=topology if by_time else None)
    if as_json:
        print(json.dumps(result.to_json(), indent=1))
    elif rank is None:
        print(result.explain())
        print(f"modelled time: {result.time(topology) * 1e3:.4g} ms")
    if rank is not None:
        if rank not in result.ranks:
            raise FlowError(f"--rank {rank} is not in the plan: it has {len(result.ranks)} ranks, {_few(result.ranks)}")
        _print_part(result, rank)
    for file in (png, svg):
        if file is not None:
            from keras_flow.boxing.drawing import drawing

            try:
                drawing(result).save(file)
            except OSError as error:
                raise FlowError(f"the picture {file} cannot be written: {error.strerror}") from error
            # with --json standard output has the plan alone
            typer.echo(f"picture: {file}", err=as_json)


def _check_file(file: Path | None, ending: str) -> None:
    if file is None:
        return
    if file.suffix != ending:
        raise FlowError(f"--{ending[1:]} writes a file that ends in {ending}, got {file}")
    if not file.parent.is_dir():
        raise FlowError(f"--{ending[1:]} {file}: there is no folder {file.parent}")


def _few(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:16])) + ", ..." * (len(ranks) > 16)


def _print_part(plan, rank: int) -> None:
    for part in plan.for_rank(rank):
        print(f"step {part.step + 1}, {part.kind}, {part.phase}:")
        for word, transfers in (("keeps", part.keeps), ("sends", part.sends), ("receives", part.receives)):
            for transfer in transfers:
                box = " x ".join(f"{start}:{stop}" for start, stop in transfer.piece.box)
                partner_of = {"keeps": "", "sends": f" to {transfer.receiver}", "receives": f" from {transfer.sender}"}
                elements = f"elements {transfer.piece.start}:{transfer.piece.stop} of [{box}]"
                print(f"  {word}{partner_of[word]}: {elements} of its {transfer.origin} shard")


def _ints(text: str, name: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise FlowError(f"--{name} takes whole numbers separated by commas, for example 2,4; got {text!r}") from None


def _link(text: str, name: str):
    from keras_flow.boxing import Link

    try:
        latency, bandwidth = (float(part) for part in text.split(","))
    except ValueError:
        raise FlowError(f"--{name} takes latency and bandwidth, for example 10e-6,10e9; got {text!r}") from None
    return Link(latency, bandwidth)
