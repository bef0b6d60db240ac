"""The names that the commands have for layouts, in words. `user_file.distribution_maker` reads them."""

#: dp4: rows over 4 ranks; tp4: variables; 2x2: both; pp2: stages of a pipeline, each of them dp or tp too
LAYOUTS = (
    "dpN, tpN, AxB, ppN, ppNxdpM, ppNxtpM, ppNxdpMxtpK, dpNz1 or AxBz3 (zero=1 to 3), "
    "dpNr, AxBz3r or ppNr (activations are computed again)"
)

#: what a pipeline's name may end with, after a hyphen
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv", "auto")

#: a name -> what it is
_EXAMPLES = {
    "dp4": "data parallel: the rows of a batch are split over 4 ranks",
    "tp4": "tensor parallel: weights are split over 4 ranks by the file's rules()",
    "2x2": "both: rows over 2 ranks, weights over 2",
    "pp2": "pipeline of 2 stages; pp2xdp2, pp2xtp2: each stage on 2 ranks",
    "dp4z1": "zero=1: ranks share the optimizer state; z2: gradients too, z3: weights",
    "dp4r": "remat: activations are computed again, to save memory; 2x2z3r, pp2r",
}


def taught() -> str:
    """Return the end of a command's help: what a name of a layout means, a line each.

    Paragraphs, because the help fills lines.
    """
    return "\n\n".join(
        ["Names of layouts, with other numbers too:", *(f"{name:6}  {what}" for name, what in _EXAMPLES.items())]
    )
