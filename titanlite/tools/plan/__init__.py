"""The planner: memory, communication and step time of a config, computed without the hardware that it names.

planner.py has `make_plan`. It runs the training program (titanlite/build.py) on fake tensors in a fake world of the
real size, once for each kind of pipeline stage (dry_run.py), with a load of experts that it assumes (expert_load.py).
It puts the step together from that: what is allocated when (memory_timeline.py), how long it takes on the device
(cost_model.py), and what pipeline ranks wait for (schedule.py). The command is `titanlite plan` (command.py).
"""
