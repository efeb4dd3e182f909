"""The worker processes that train the model on one machine, and the peer process's control over them.

Only the worker process imports torch, in `worker` and `assembly`. The modules that the peer process imports need none.

Other rooms import:
control: InnerLoopDone, InnerStepDone
group: WorkerGroup
needs: Needs, UTILISATION, needs_lines, needs_of
options: TEMPERATURE, WorkerOptions, choose_devices, needs_gpu_count, parse_overlap
supervisor: Supervisor, WorkersRestartedError
telemetry: Telemetry
trackers: TrackerSpec, tracking
"""
