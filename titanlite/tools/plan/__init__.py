"""The planner: memory, communication and step time of a config, computed without the hardware that it names.

`make_plan` (planner.py) runs the training program (titanlite/build.py) on fake tensors, in a fake process group with
the real number of ranks, once for each kind of pipeline stage (dry_run.py), with an assumed load of experts
(expert_load.py). From these dry runs, make_plan composes a step: memory over time (memory_timeline.py), time on the
device (cost_model.py) and the waits of pipeline ranks (schedule.py). `titanlite plan` (command.py) prints the plan."""
