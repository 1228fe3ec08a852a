"""Bytes of the simulator against a real run: what the sockets of one `diloco up` counted, beside the prediction.

    python benchmarks/wire_bytes.py [-- options of diloco up]

The learner that sent version 0 sent the model once more than the others, so it is left out.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from decoupled_diloco.common.config import RunSettings, TaskSettings
from decoupled_diloco.common.fragments import Layout, balanced_plan
from decoupled_diloco.simulator.bandwidth import Traffic, traffic
from measured import Measured, table, up


def predicted(run: Measured, learners: int) -> Traffic:
    settings = json.loads((run.folder / "settings.json").read_text())
    state = json.loads(next(run.folder.glob("global/version-0/state.json")).read_text())
    plan = balanced_plan(Layout.from_wire(state["layout"]), state["P"])
    lengths = [fragment.length for fragment in plan.fragments]
    return traffic(RunSettings.from_map(settings["run"]), lengths, learners, TaskSettings.from_map(settings["task"]))


def rows(run: Measured) -> list[dict[str, Any]]:
    summary = json.loads((run.folder / "summary.json").read_text())
    learners = sorted(summary["learners"], key=lambda row: row["bytes_up"])[:-1]
    weights = predicted(run, len(summary["learners"]))
    found = []
    for learner in learners:
        asked = {"rounds": summary["merges"], "seconds": learner["since_first_step_seconds"]}
        for direction, said in (("up", weights.up(**asked)), ("down", weights.down(**asked))):
            counted = learner[f"bytes_{direction}"]
            found.append({"learner": learner["name"], "direction": direction, "counted": counted,
                          "said": round(said), "counted / said": round(counted / said, 4)})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", help="options of diloco up")
    asked = parser.parse_args()
    print(table(rows(up(*asked.options))))


if __name__ == "__main__":
    main()
