"""The command line `keras-flow`. Loads neither Keras nor an engine: the commands do, when they run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from keras_flow import __version__, settings
from keras_flow.cli.boxing import boxing
from keras_flow.cli.checkpoint import checkpoint
from keras_flow.cli.compare import compare
from keras_flow.cli.doctor import doctor
from keras_flow.cli.explain import explain
from keras_flow.cli.init import init
from keras_flow.cli.launch import launch
from keras_flow.cli.verify import verify
from keras_flow.errors import FlowError
from keras_flow.launch import noise
from keras_flow.launch.failure import RankError

#: commands that load an engine in this process; the others start processes, which leave out known lines themselves
_LOAD_AN_ENGINE = {"checkpoint", "explain"}

app = typer.Typer(
    name="keras-flow",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"keras-flow {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Distribution for Keras 3 on JAX, TensorFlow and PyTorch."""
    settings.check()


app.command()(boxing)
app.command()(checkpoint)
app.command()(compare)
app.command()(doctor)
app.command()(explain)
app.command()(init)
app.command(context_settings={"allow_interspersed_args": False})(launch)
app.command()(verify)


def main() -> None:
    """Entry point of the console script. An error of keras_flow is its text and exit status 1, without a traceback.

    Where a rank of `launch` failed, the status is that rank's own.
    """
    if set(sys.argv[1:2]) & _LOAD_AN_ENGINE:
        noise.filter_stderr()
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first.endswith(".py"):
        sys.exit(
            f"keras-flow: {first} is no command. A script is started on several ranks by `keras-flow launch "
            f"--devices 4 {first}`, on all engines by `keras-flow compare {first}`; `keras-flow --help` lists commands."
        )
    try:
        app()
    except FlowError as error:
        print(f"keras-flow: {error}", file=sys.stderr)
        sys.exit(error.exit_status if isinstance(error, RankError) else 1)
    except KeyboardInterrupt:
        print("keras-flow: interrupted; every rank was ended", file=sys.stderr)
        # as a shell says it of a program that was interrupted: 128 + SIGINT
        sys.exit(130)


if __name__ == "__main__":
    main()
