"""The command line `keras-flow`. Loads neither Keras nor an engine: the commands do, when they run."""

from __future__ import annotations

import functools
import inspect
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from keras_flow import __version__, layout_names, settings
from keras_flow.cli.boxing import boxing
from keras_flow.cli.checkpoint import checkpoint
from keras_flow.cli.compare import compare
from keras_flow.cli.doctor import doctor
from keras_flow.cli.explain import explain
from keras_flow.cli.init import init
from keras_flow.cli.launch import launch
from keras_flow.cli.verify import verify
from keras_flow.errors import FlowError, FlowWarning
from keras_flow.launch import noise
from keras_flow.launch.failure import RankError

#: what the parser says of a wrong command line; typer has click as a package beside it, or within, by its version
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
#: commands that load an engine in this process; the others start processes, which leave out known lines themselves
_LOAD_AN_ENGINE = {"checkpoint", "explain"}


def _other_names(name: str) -> str:
    """An option as the commands have it: torchrun's may have `_` or `-`, and OneFlow's launcher has a longer one."""
    name = name.replace("_", "-")
    return "redirect" if name == "redirect-stdout-and-stderr" else name


class _FlagsWithoutType:
    """Shows flags without `<bool>` in the help: a flag takes no value."""

    def get_params(self, ctx: typer.Context) -> list[Any]:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class _Command(_FlagsWithoutType, TyperCommand):
    """Says of a word too many what the command takes: `keras-flow checkpoint verify DIR` means an option."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if error.message.startswith("Got unexpected extra argument"):
                error.message = f"{error.message.rstrip('.')}. {self._takes(ctx, words)}"
            raise

    def _takes(self, ctx: typer.Context, words: list[str]) -> str:
        options = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        for word in words:
            if f"--{word}" in options:
                return f"Did you mean the option --{word}?"
        taken = " ".join(piece for piece in self.collect_usage_pieces(ctx) if piece != "[OPTIONS]")
        return f"keras-flow {self.name} takes {f'{taken} and options' if taken else 'options only'}; --help lists them."


class _Commands(_FlagsWithoutType, TyperGroup):
    """Lists the commands where there is none of the name that was given."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            error.message += f" The commands are {', '.join(self.list_commands(ctx))}."
            raise


app = typer.Typer(
    name="keras-flow",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": _other_names},
)


def _add(command: Callable[..., None], **settings: Any) -> None:
    """Add a command, whose help has the paragraphs of its docstring and not the lines."""
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.__doc__ or ""))
    written = "; no report was written" if command is compare else ""

    @functools.wraps(command)
    def told(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (KeyboardInterrupt, typer.Abort) as error:  # typer would leave without a word
            if not any(isinstance(each, KeyboardInterrupt) for each in (error, error.__context__)):  # nobody answered
                raise FlowError(
                    f"{command.__name__} got no answer; what it asks for can be given as options, which --help lists"
                ) from None
            print(f"keras-flow: interrupted{written}", file=sys.stderr)
            # as a shell says it of a program that was interrupted: 128 + SIGINT
            raise typer.Exit(130) from None

    app.command(help=text, cls=_Command, **settings)(told)


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


_add(boxing)
_add(checkpoint)
_add(compare, epilog=layout_names.taught())
_add(doctor)
_add(explain, epilog=layout_names.taught())
_add(init)
_add(launch, context_settings={"allow_interspersed_args": False})
_add(verify, epilog=layout_names.taught())


def _show_warning(message: Any, category: type[Warning], filename: str, lineno: int, *others: Any) -> None:
    """Show a warning: one of keras_flow without the line of the command's own script, which no user has written."""
    if issubclass(category, FlowWarning) and Path(filename) == Path(sys.argv[0]):
        print(f"keras-flow: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno), end="", file=sys.stderr)


def _end(number: int, _: object) -> None:
    os.write(2, b"keras-flow: interrupted; every process was ended\n")  # stderr may be in use as the signal comes
    sys.exit(128 + number)


def main() -> None:
    """Entry point of the console script. An error of keras_flow is its text and exit status 1, without a traceback.

    Where a rank of `launch` failed, the status is that rank's own.
    """
    if set(sys.argv[1:2]) & _LOAD_AN_ENGINE:
        noise.filter_stderr()
    warnings.showwarning = _show_warning
    # the engines' processes end with this one, as they do after Ctrl-C; `launch` takes the signal over
    signal.signal(signal.SIGTERM, _end)
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first.endswith(".py"):
        sys.exit(
            f"keras-flow: {first} is no command. A script is started on several ranks by `keras-flow launch "
            f"--devices 4 {first}`, on all engines by `keras-flow compare {first}`; `keras-flow --help` lists commands."
        )
    try:
        app()
    except FlowError as error:
        text = str(error)  # which may begin with the command that it is of
        print(text if text.startswith("keras-flow ") else f"keras-flow: {text}", file=sys.stderr)
        sys.exit(error.exit_status if isinstance(error, RankError) else 1)


if __name__ == "__main__":
    main()
