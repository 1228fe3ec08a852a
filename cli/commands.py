"""The `diloco` command. Each subcommand gathers its settings and calls a part; what is heavy is loaded inside.

Errors are one sentence on standard error; the exit code is the error's own (common/errors.py), 2 for a wrong setting.
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
from .environment import EnvironmentGroup, from_environment, in_force, strangers
from .keys_command import keys
from .options import explicit, made_of, options_of
from .simulate import compare, replay, simulate

NICENESS = 10
"""Of the evaluator: on a busy machine a learner's thread gets about ten times as much as this one."""
BROKER = click.option(
    "--broker", default="tcp://127.0.0.1:5550", show_default=True, help="The broker's address: tcp://HOST:PORT."
)
DATA = click.option(
    "--data", type=click.Path(path_type=Path), help="A text file or a folder of them. Without it: Python's own library."
)
THREADS = click.option(
    "--threads", type=click.IntRange(0), default=0, show_default=True, help="Threads to compute with. 0 = all cores."
)
REDIS = click.option(
    "--redis",
    help="URL of Redis or Valkey, like redis://HOST:6379/0. Without it: none.",
)
KEY = click.option(
    "--key", type=click.Path(path_type=Path), help="The key file, for a broker with keys. It says which run, too."
)
STORE = click.option(
    "--redis",
    help="The store to look into, like redis://HOST:6379/0. Without it: the one of the `diloco up` that runs here.",
)
RUN_ARGUMENT = click.argument("run", metavar="[RUN]", default="")


@click.group(cls=EnvironmentGroup, invoke_without_command=True, context_settings={"max_content_width": 110})
@click.version_option(package_name="decoupled-diloco")
@click.option("--parent", type=int, hidden=True)
@click.option("--log-file", type=click.Path(path_type=Path), help="Append events to this file, one JSON line each.")
@click.option("--log-level", default="info", show_default=True, help="Least level told: debug, info, warning, error.")
@click.pass_context
def group(context: click.Context, /, parent: int | None, **logging: Any) -> None:
    """Train one model on compute that is far apart, unequal and unreliable, without ever stopping.

    `diloco up` trains a small language model on this machine; `diloco learner --broker tcp://HOST:5550` helps a run
    from another one.
    """
    if parent is not None:
        from ..compose.processes import die_with

        die_with(parent)
    if said := strangers(group, os.environ):
        echo(f"diloco: {said}", err=True)
    context.obj = {"terminal": parent is None, **logging}
    if context.invoked_subcommand is None:
        echo(context.get_help())


def _begin(context: click.Context, process: str, config: Any, **more: Any) -> None:
    """Open the log of a process, whose first event says what is in force and what of it variables gave."""
    from ..common.log import configure, get_logger

    options = context.obj
    configure(process, json_file=options["log_file"], level=options["log_level"], terminal=options["terminal"])
    given = [*from_environment(context), *from_environment(context.find_root())]
    get_logger(process).info("settings", **in_force(config, **more), from_environment=given)


@group.command()
@options_of(RunSettings, defaults={"run": "made from date and time"})
@options_of(TaskSettings)
@options_of(UpConfig)
@click.pass_context
def up(context: click.Context, /, **given: Any) -> int:
    """Train on this machine, with all parts as processes.

    Store, broker, syncer, evaluator and learners are kept alive until the last step. Ctrl-C once finishes the round,
    saves and ends; twice ends at once. `--resume NAME` goes on.
    """
    from ..compose import up

    config, told = made_of(UpConfig, given), explicit(context)
    if not config.as_json:
        make_stdout_expendable()
    given |= {name: value for name, value in preset(config.preset, config.learners).items() if name not in told}
    return up.up(config, made_of(RunSettings, given), made_of(TaskSettings, given), told, context.obj)


@group.command()
@options_of(BrokerConfig)
@click.pass_context
def broker(context: click.Context, /, **given: Any) -> int:
    """Pass messages on: the one address that all others need."""
    from ..broker.__main__ import main as run_broker

    config = made_of(BrokerConfig, given)
    _begin(context, "broker", config)
    return run_broker(config)


@group.command()
@BROKER
@REDIS
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="The run's folder. Without it: runs/NAME.")
@click.option("--own-model", is_flag=True, help="Learners bring their own model by join(); no built-in learner.")
@click.option("--init", type=click.Path(path_type=Path), help="A safetensors file to begin from.")
@DATA
@KEY
@click.option("--tape", type=click.Path(path_type=Path), help="Folder into which an event tape is written, for replay.")
@click.option("--stop-redis", is_flag=True, help="Once the run is finished and saved, tell Redis to save and end too.")
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="decoupled",
    show_default=True,
    help="Settings that belong together; what is given beside it counts.",
)
@options_of(RunSettings)
@options_of(TaskSettings)
@click.pass_context
def syncer(context: click.Context, /, **given: Any) -> int:
    """Hold the global model, and merge into it what learners send.

    It goes on where its folder stands, and ends with the run.
    """
    from .syncer import syncer_config

    is_child = not context.obj["terminal"]  # for its own children `diloco up` has looked
    config = syncer_config(given, explicit(context), redis_is_checked=is_child)
    _begin(context, "syncer", config)
    from ..syncer.__main__ import main as run_syncer

    run_syncer(config)
    return 0


@group.command()
@BROKER
@click.option("--name", help="A name of its own in the run. Without it: made from the key's and this machine's.")
@options_of(LearnerConfig, leave_out=("broker", "name"))
@DATA
@click.option("--device", default="cpu", show_default=True, help="Where to compute: cpu, cuda, or cuda:N.")
@THREADS
@click.pass_context
def learner(context: click.Context, /, **given: Any) -> int:
    """Join a run and train the built-in language model.

    Leave by Ctrl-C whenever you like; the others go on.
    """
    # Threads that spin while they wait for one another take the cores away from this machine's other processes, and
    # wait for cores themselves: steps then last many times as long. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from ..learner.learner_name import called

    config = made_of(LearnerConfig, given | called(given["run"], given["name"] or None, given["key"], "learner"))
    from ..learner.task.main import main as run_learner

    own = {"data": given["data"], "device": given["device"], "threads": given["threads"] or os.cpu_count() or 1}
    _begin(context, config.name, config, **own)
    return run_learner(config, **own)


@group.command()
@BROKER
@options_of(LearnerConfig, leave_out=("broker", "name", "directory", "orphan_timeout_seconds", "tape"))
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Where evaluations.jsonl is written: the run's folder. Without it: the working directory.",
)
@DATA
@click.option("--eval-every", type=float, default=15.0, show_default=True, help="Seconds between two evaluations.")
@click.option("--report", is_flag=True, help="At the run's end write metrics.csv and loss.png, and show its figures.")
@click.pass_context
def evaluator(context: click.Context, /, **given: Any) -> int:
    """Judge a run's global model on held-out text, without a vote."""
    from ..learner.learner_name import called

    own = called(given["run"], None, given["key"], "observer", "learner", otherwise="evaluator")
    config = made_of(LearnerConfig, given | own)
    _begin(context, "evaluator", config, data=given["data"], eval_every=given["eval_every"])
    os.nice(NICENESS)  # before torch is loaded: that alone is a second of computing, which learners need at the start
    make_stdout_expendable()
    if given["report"]:
        from ..compose.evaluator_report import evaluate_and_report as run_evaluator
    else:
        from ..learner.task.evaluator import main as run_evaluator
    return run_evaluator(config, given["data"], given["eval_every"])


@group.command()
@BROKER
@KEY
@click.option("--run", default="", help="The run whose beat is waited for. Without it: the key's, or any.")
@click.option("--beat", is_flag=True, help="Wait for a beat of the run, too: then its syncer is there as well.")
@click.option(
    "--timeout", "timeout_seconds", type=float, default=5.0, show_default=True, help="Seconds to wait, at most."
)
def ping(broker: str, key: Path | None, run: str, timeout_seconds: float, *, beat: bool) -> int:
    """Send a message through the broker and back.

    Says how many milliseconds it took on each plane. Exit code 0 if it came back, 3 if not: a health check.
    """
    from ..monitor.ping import ping as send

    echo(send(broker, key=key, run=run, wants_beat=beat, timeout_seconds=timeout_seconds))
    return 0


@group.command()
@RUN_ARGUMENT
@STORE
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def status(run: str, redis: str | None, *, as_json: bool) -> int:
    """Show how a run stands.

    RUN is its name or folder; without it, the run that is up here, or else the newest.
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
@RUN_ARGUMENT
@STORE
def watch(run: str, redis: str | None) -> int:
    """Watch a run until it ends or you press Ctrl-C.

    RUN is its name or folder; without it, the run that is up here.
    """
    from ..monitor.status import find_source
    from ..monitor.watch import follow

    return follow(find_source(run, redis))


@group.command()
@RUN_ARGUMENT
@click.option("--prompt", default="def ", show_default=True, help="Text to begin with.")
@click.option("--bytes", "length", type=int, default=200, show_default=True, help="How many bytes to write after it.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed writes another text.")
def sample(run: str, prompt: str, length: int, seed: int) -> int:
    """Let the global model of a run write.

    RUN is its name or folder; without it, the newest here. Of a run that is not over, the newest checkpoint writes.
    """
    from ..common.run_folder import find
    from ..compose.final_report import sample_text

    echo(sample_text(find(run), prompt, length, seed))
    return 0


@group.command()
@RUN_ARGUMENT
@click.option("--to", type=click.Path(path_type=Path), help="The file to write. Without it: RUN's model.safetensors.")
def export(run: str, to: Path | None) -> int:
    """Write the global model of a run to a safetensors file.

    RUN is its name or folder; without it, the newest here. Of a run that is not over, it is the newest checkpoint.
    """
    from ..common.run_folder import find, shown
    from ..compose.final_report import export_model

    echo(shown(export_model(find(run), to)))
    return 0


@group.command()
@RUN_ARGUMENT
def report(run: str) -> int:
    """Write a run's metrics.csv and loss.png, and show its figures.

    RUN is its name or folder; without it, the newest here.
    """
    from ..common.run_folder import find
    from ..compose.final_report import show_report

    return show_report(find(run))


group.add_command(keys)
group.add_command(simulate)
group.add_command(replay)
group.add_command(compare)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command and end the process with its exit code."""
    output, _ = protect()
    code = run_command(arguments)
    # All that matters is written, closed and joined by now. The interpreter would take torch's modules apart one by
    # one, for a second of CPU: too much where all processes of a run end together and somebody waits for them.
    atexit._run_exitfuncs()  # noqa: SLF001 the only public way to them is the slow one
    sys.stdout.flush()
    if output.failure is not None and not (code or output.expendable or output.unwanted):
        code = _say(f"standard output could not be written: {output.failure.strerror}", 1)
    sys.stderr.flush()
    os._exit(code)


def run_command(arguments: list[str] | None = None) -> int:
    """The exit code of one command; what went wrong is said in one sentence on standard error."""
    try:
        return int(group.main(arguments, prog_name="diloco", standalone_mode=False) or 0)
    except click.ClickException as wrong:
        return _say(wrong.format_message(), 2)
    except DilocoError as wrong:
        return _say(str(wrong), wrong.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except Exception as wrong:
        reason = limit_of(wrong)
        if not reason:
            raise
        return _say(f"{type(wrong).__name__}: {wrong}: {reason}", 1)


def _say(sentence: str, code: int) -> int:
    echo(f"diloco: {printable(' '.join(sentence.split()))}", err=True)
    return code
