"""The `diloco` command and its subcommands. Each builds its settings and calls one part, imported when needed.

Errors are one sentence on standard error, with the exit code of their class (common/errors.py).
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from ..common.config import PRESETS, BrokerConfig, LearnerConfig, RunSettings, TaskSettings, preset
from ..common.errors import DilocoError
from ..common.output import echo, make_stdout_expendable, protect
from ..common.printable import json_line, printable
from ..common.system_limits import limit_of
from ..compose.up_config import UpConfig
from .environment import EnvironmentGroup, effective_settings, from_environment, unknown_variables
from .keys_command import keys
from .options import explicit_fields, from_options, options_of
from .simulate import compare, replay, simulate

_EVALUATOR_NICENESS = 10
"""On a busy machine a learner's thread gets about ten times as much CPU time as the evaluator."""
_BROKER = click.option(
    "--broker", default="tcp://127.0.0.1:5550", show_default=True, help="Address of the broker: tcp://HOST:PORT."
)
_DATA = click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Text file, or folder of text files. Without it: the source of Python's standard library.",
)
_THREADS = click.option(
    "--threads", type=click.IntRange(0), default=0, show_default=True, help="CPU threads. 0 = all cores."
)
_REDIS = click.option(
    "--redis",
    help="URL of the Redis or Valkey in which the run is published, such as redis://HOST:6379/0. Without it: none.",
)
_KEY = click.option(
    "--key", type=click.Path(path_type=Path), help="Key file, for a broker with keys. It also names the run."
)
_REDIS_TO_READ = click.option(
    "--redis",
    help="URL of the Redis to read from, such as redis://HOST:6379/0. Without it: that of `diloco up` on this machine.",
)
_RUN_ARGUMENT = click.argument("run", metavar="[RUN]", default="")


@click.group(cls=EnvironmentGroup, invoke_without_command=True, context_settings={"max_content_width": 110})
@click.version_option(package_name="decoupled-diloco")
@click.option("--parent", type=int, hidden=True)
@click.option(
    "--log-file", type=click.Path(path_type=Path), help="Append log events to this file, one line of JSON each."
)
@click.option(
    "--log-level", default="info", show_default=True, help="Lowest level of logged events: debug, info, warning, error."
)
@click.pass_context
def group(context: click.Context, /, parent: int | None, **logging: Any) -> None:
    """Train one model on compute that is far apart, unequal and unreliable, without ever stopping.

    `diloco up` trains a small language model on this machine. For several machines start a broker, a syncer and
    learners (see README.md). `diloco COMMAND --help` explains each command.
    """
    if parent is not None:
        from ..compose.processes import die_with

        die_with(parent)
    if warning := unknown_variables(group, os.environ):
        echo(f"diloco: {warning}", err=True)
    context.obj = {"terminal": parent is None, **logging}
    if context.invoked_subcommand is None:
        echo(context.get_help())


def _open_log(context: click.Context, process: str, config: Any, **more: Any) -> None:
    """Open the log of a process; its first event has all settings and those that came from variables."""
    from ..common.log import configure, get_logger

    logging = context.obj
    configure(process, json_file=logging["log_file"], level=logging["log_level"], terminal=logging["terminal"])
    variables = [*from_environment(context), *from_environment(context.find_root())]
    get_logger(process).info("settings", **effective_settings(config, **more), from_environment=variables)


@group.command()
@options_of(RunSettings, defaults={"run": "date and time"})
@options_of(TaskSettings)
@options_of(UpConfig)
@click.pass_context
def up(context: click.Context, /, **options: Any) -> int:
    """Train on this machine, with each part as a process.

    Starts Redis, broker, syncer, evaluator and learners, and restarts them until the last step. The first Ctrl-C
    finishes the open round, saves and exits; the second kills everything. `--resume NAME` continues a stopped run.

    Example: diloco up --learners 4 --steps 1000 --data my-text.txt
    """
    from ..compose import up

    config, explicit = from_options(UpConfig, options), explicit_fields(context)
    if not config.as_json:
        make_stdout_expendable()
    options |= {name: value for name, value in preset(config.preset, config.learners).items() if name not in explicit}
    settings, task = from_options(RunSettings, options), from_options(TaskSettings, options)
    return up.up(config, settings, task, explicit, context.obj)


@group.command()
@options_of(BrokerConfig)
@click.pass_context
def broker(context: click.Context, /, **options: Any) -> int:
    """Run the broker, to whose address all processes connect.

    It forwards messages between the syncer, the learners and observers, on four consecutive TCP ports.

    Example: diloco broker --host 0.0.0.0 --keys keys
    """
    from ..broker.__main__ import main as run_broker

    config = from_options(BrokerConfig, options)
    _open_log(context, "broker", config)
    return run_broker(config)


@group.command()
@_BROKER
@_REDIS
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Folder of the run. Without it: runs/NAME.")
@click.option(
    "--own-model",
    is_flag=True,
    help="Learners bring their own model with join(). Without it: the built-in language model.",
)
@click.option(
    "--init",
    type=click.Path(path_type=Path),
    help="Safetensors file with the initial model. Without it: that of the first learner.",
)
@_DATA
@_KEY
@click.option(
    "--tape", type=click.Path(path_type=Path), help="Folder for an event tape, for diloco replay. Without it: no tape."
)
@click.option("--stop-redis", is_flag=True, help="Have Redis save and shut down once the run is finished and saved.")
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="decoupled",
    show_default=True,
    help="Set of settings; explicitly given options take precedence. streaming and diloco wait for all learners.",
)
@options_of(RunSettings)
@options_of(TaskSettings)
@click.pass_context
def syncer(context: click.Context, /, **options: Any) -> int:
    """Run the syncer: hold the global model and merge deltas into it.

    It continues the run in its folder, if there is one, and exits when the run is finished. A run has one syncer.

    Example: diloco syncer --broker tcp://HOST:5550 --run my-run --steps 1000
    """
    from .syncer import syncer_config

    is_child = not context.obj["terminal"]  # `diloco up` has checked Redis for its children
    config = syncer_config(options, explicit_fields(context), redis_is_checked=is_child)
    _open_log(context, "syncer", config)
    from ..syncer.__main__ import main as run_syncer

    run_syncer(config)
    return 0


@group.command()
@_BROKER
@click.option("--name", help="Unique name in the run. Without it: derived from the key's and this machine's.")
@options_of(LearnerConfig, leave_out=("broker", "name"))
@_DATA
@click.option("--device", default="cpu", show_default=True, help="Device to compute on: cpu, cuda, or cuda:N.")
@_THREADS
@click.pass_context
def learner(context: click.Context, /, **options: Any) -> int:
    """Join a run and train the built-in language model.

    Ctrl-C leaves the run at any time; the other learners continue.

    Example: diloco learner --broker tcp://HOST:5550 --device cuda
    """
    # OpenMP threads that spin while waiting take the cores from the other processes of this machine, and steps then
    # take many times as long. torch reads this variable when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from ..learner.learner_name import resolve_name

    config = from_options(
        LearnerConfig, options | resolve_name(options["run"], options["name"] or None, options["key"], "learner")
    )
    from ..learner.task.main import main as run_learner

    own = {"data": options["data"], "device": options["device"], "threads": options["threads"] or os.cpu_count() or 1}
    _open_log(context, config.name, config, **own)
    return run_learner(config, **own)


@group.command()
@_BROKER
@options_of(LearnerConfig, leave_out=("broker", "name", "directory", "orphan_timeout_seconds", "tape"))
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Folder for evaluations.jsonl: the run's folder. Without it: the working directory.",
)
@_DATA
@click.option("--eval-every", type=float, default=15.0, show_default=True, help="Seconds between two evaluations.")
@click.option(
    "--report", is_flag=True, help="At the end of the run, write metrics.csv and loss.png, and print its figures."
)
@click.pass_context
def evaluator(context: click.Context, /, **options: Any) -> int:
    """Evaluate a run's global model on validation text.

    The evaluator only observes the run: it sends no deltas and does not count for the quorum.

    Example: diloco evaluator --broker tcp://HOST:5550 --eval-every 60
    """
    from ..learner.learner_name import resolve_name

    own = resolve_name(options["run"], None, options["key"], "observer", "learner", otherwise="evaluator")
    config = from_options(LearnerConfig, options | own)
    _open_log(context, "evaluator", config, data=options["data"], eval_every=options["eval_every"])
    os.nice(_EVALUATOR_NICENESS)  # before torch is loaded: that takes a second of CPU time, which the learners need
    make_stdout_expendable()
    if options["report"]:
        from ..compose.evaluator_report import evaluate_and_report as run_evaluator
    else:
        from ..learner.task.evaluator import main as run_evaluator
    return run_evaluator(config, options["data"], options["eval_every"])


@group.command()
@_BROKER
@_KEY
@click.option("--run", default="", help="With --beat: name of the run. Without it: the key's run, or any.")
@click.option("--beat", is_flag=True, help="Also wait for a beat, which shows that the run's syncer is running.")
@click.option("--timeout", "timeout_seconds", type=float, default=5.0, show_default=True, help="Most seconds to wait.")
def ping(broker: str, key: Path | None, run: str, timeout_seconds: float, *, beat: bool) -> int:
    """Send a message through the broker and back.

    Prints the round-trip time, in milliseconds, of control and bulk messages. Exit code 0 if they return, 3 if not, as
    for a health check.

    Example: diloco ping --broker tcp://HOST:5550 --beat
    """
    from ..monitor.ping import ping as send

    echo(send(broker, key=key, run=run, wants_beat=beat, timeout_seconds=timeout_seconds))
    return 0


@group.command()
@_RUN_ARGUMENT
@_REDIS_TO_READ
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def status(run: str, redis: str | None, *, as_json: bool) -> int:
    """Show the state of a run.

    RUN is its name or folder; without it, the run that is up on this machine, or else the newest.

    Example: diloco status my-run --json
    """
    from ..monitor.status import find_source
    from ..monitor.watch import table

    now = find_source(run, redis).read()
    if as_json:
        echo(json_line(now.figures()))
    else:
        from ..monitor.console import PlainConsole

        PlainConsole().print(table(now))
    return 0


@group.command()
@_RUN_ARGUMENT
@_REDIS_TO_READ
def watch(run: str, redis: str | None) -> int:
    """Show the state of a run live, until it ends or Ctrl-C.

    RUN is its name or folder; without it, the run that is up on this machine.

    Example: diloco watch my-run --redis redis://HOST:6379/0
    """
    from ..monitor.status import find_source
    from ..monitor.watch import follow

    return follow(find_source(run, redis))


@group.command()
@_RUN_ARGUMENT
@click.option("--prompt", default="def ", show_default=True, help="Text that the model continues.")
@click.option("--bytes", "length", type=int, default=200, show_default=True, help="Number of bytes to generate.")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of the text.")
def sample(run: str, prompt: str, length: int, seed: int) -> int:
    """Generate text with the global model of a run.

    RUN is its name or folder; without it, the newest run under runs/. For a run that is not finished, the newest
    checkpoint is used. Only for runs of the built-in language model.

    Example: diloco sample my-run --prompt "import " --bytes 500
    """
    from ..common.run_folder import find_run
    from ..compose.final_report import sample_text

    echo(sample_text(find_run(run), prompt, length, seed))
    return 0


@group.command()
@_RUN_ARGUMENT
@click.option(
    "--to", type=click.Path(path_type=Path), help="File to write. Without it: model.safetensors in the run's folder."
)
def export(run: str, to: Path | None) -> int:
    """Write the global model of a run to a safetensors file.

    RUN is its name or folder; without it, the newest run under runs/. For a run that is not finished, the newest
    checkpoint is written.

    Example: diloco export my-run --to model.safetensors
    """
    from ..common.run_folder import display_path, find_run
    from ..compose.final_report import export_model

    echo(display_path(export_model(find_run(run), to)))
    return 0


@group.command()
@_RUN_ARGUMENT
def report(run: str) -> int:
    """Write a run's metrics.csv and loss.png, and print its figures.

    RUN is its name or folder; without it, the newest run under runs/.

    Example: diloco report my-run
    """
    from ..common.run_folder import find_run
    from ..compose.final_report import show_report

    return show_report(find_run(run))


group.add_command(keys)
group.add_command(simulate)
group.add_command(replay)
group.add_command(compare)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command and end the process with its exit code."""
    output, _ = protect()
    code = run_command(arguments)
    # All files are written and closed, and all threads joined. A normal exit would take a second of CPU time to unload
    # torch: too much where all processes of a run exit at the same time.
    atexit._run_exitfuncs()  # noqa: SLF001 the only public way is the slow one
    sys.stdout.flush()
    if output.failure is not None and not (code or output.expendable or output.unwanted):
        code = _fail(f"standard output could not be written: {output.failure.strerror}", 1)
    sys.stderr.flush()
    os._exit(code)


def run_command(arguments: list[str] | None = None) -> int:
    """The exit code of one command; an error is printed to standard error as one sentence."""
    try:
        return int(group.main(arguments, prog_name="diloco", standalone_mode=False) or 0)
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except DilocoError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except Exception as error:
        reason = limit_of(error)
        if not reason:
            raise
        return _fail(f"{type(error).__name__}: {error}: {reason}", 1)


def _fail(sentence: str, code: int) -> int:
    echo(f"diloco: {printable(' '.join(sentence.split()))}", err=True)
    return code
