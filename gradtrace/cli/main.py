"""Enter the command line: load a command, run it, and turn whatever happens into an exit status."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import click

from gradtrace import __version__
from gradtrace.cli import failure
from gradtrace.errors import BadOptionError, GradtraceError

# Each command stands in a module of its name and is imported only when it runs; --help needs none.
COMMANDS: Final = {
    "demo": "Trace two small ZeRO runs that disagree, and explain why.",
    "doctor": "Say what can be traced here: probes, points, laws, cost.",
    "run": "Run a training script with every DeepSpeed engine traced.",
    "info": "Say what is in a trace.",
    "diff": "Find the first place where two traces disagree, and whom to blame.",
    "audit": "Check the laws of ZeRO's gradient path on one trace.",
    "show": "Show one record: statistics, values, where it came from.",
    "verify": "Check the integrity of every file of a trace.",
    "report": "Write one file to attach to a bug report: no weights, no data.",
    "merge": "Make one trace of the directories that several hosts wrote.",
}

INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE


class LazyGroup(click.Group):
    """Hold the commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gradtrace.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from their summaries, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    name="gradtrace",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 agree, rounding or all laws hold; 1 findings; 2 cannot say; "
    "3 internal error.",
)
@click.version_option(__version__, prog_name="gradtrace")
@click.option("--debug", is_flag=True, help="Print the traceback of an internal error.")
@click.option(
    "--local_rank", hidden=True
)  # of the deepspeed launcher; 'run' hands it to the script
def group(debug: bool, local_rank: str | None) -> None:
    """Say where and why two DeepSpeed ZeRO runs stop agreeing."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        argv: the arguments after the program's name; ``sys.argv`` by default.
    """
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit status (DESIGN section 7).

    Raises:
        BaseException: what the script ended with that ``gradtrace run`` ran.
    """
    launch = _guarded(argv, lambda: _invoke(list(argv)))
    if not callable(launch):
        return launch
    # A script ends as it would have without gradtrace: nothing of its own is caught here.
    try:
        return launch()
    except GradtraceError as error:
        return failure.report(failure.of_error(error), as_json=False)


def _guarded(
    argv: Sequence[str], work: Callable[[], int | Callable[[], int]]
) -> int | Callable[[], int]:
    """Turn whatever happens in a command into an exit status."""
    as_json = wants_json(argv)
    try:
        if not runs_script(argv):
            _make_streams_lenient()
        status = work()
        sys.stdout.flush()
    except GradtraceError as error:
        return failure.report(failure.of_error(error), as_json)
    except click.ClickException as error:
        return failure.report(_of_usage(error), as_json)
    except (KeyboardInterrupt, click.Abort):
        failure.say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return BROKEN_PIPE
    except OSError as error:
        return failure.report(failure.of_os_error(error), as_json)
    except MemoryError:
        return failure.report(failure.of_memory(), as_json)
    except Exception as error:
        if "--debug" in argv or os.environ.get("GRADTRACE_DEBUG", "0") not in ("", "0"):
            failure.print_traceback(error)
        return failure.report(failure.of_bug(error), as_json)
    return status


def wants_json(argv: Sequence[str]) -> bool:
    """Say whether the command line asks for JSON; the arguments of a script do not count."""
    if runs_script(argv):
        return False
    own = argv[: list(argv).index("--")] if "--" in argv else argv
    return "--json" in own


def runs_script(argv: Sequence[str]) -> bool:
    """Say whether the command line runs a script: then the streams and what follows are its own."""
    return [word for word in argv if not word.startswith("-")][:1] == ["run"]


def _invoke(argv: list[str]) -> int | Callable[[], int]:
    """Parse and run; click's own main is not used, for it turns a broken pipe into status 1."""
    try:
        with group.make_context("gradtrace", argv) as context:
            result = group.invoke(context)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    return result if isinstance(result, int) or callable(result) else 0


def _of_usage(error: click.ClickException) -> failure.Failure:
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = "gradtrace" if context is None else context.command_path
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        found = "no command" if path == "gradtrace" else "no arguments"
    else:
        found = error.format_message().rstrip(".").replace("\n", " ")
    return failure.of_error(
        BadOptionError(
            found[:1].lower() + found[1:],
            where=f"the command line of '{path}'",
            expected="what its help lists",
            remedy=f"Run '{path} --help'.",
        )
    )


def _make_streams_lenient() -> None:
    """Let no terminal's encoding turn a report into a crash."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _silence_stdout() -> None:
    """Keep Python's own flush at exit from complaining about the closed pipe."""
    # An OSError or ValueError means that stdout is no real file: a test harness replaced it.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
