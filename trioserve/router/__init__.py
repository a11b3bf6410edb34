"""Many models behind one address: each runs in a separate process, which is started on demand.

`Fleet` has the processes. `schedule` decides which models run, wait and are stopped, without a
clock or a process. `child` is one process from its start to its end, which `trioserve.children`
starts. `models` is for programs: models in processes, used like a `Server`.
"""
