"""The processes of a machine that train, and how the peer process commands them.

Only a worker imports torch, in worker and assembly; what the peer process imports from here needs none.

Other rooms import:
control: InnerLoopDone, InnerStepDone
group: WorkerGroup
needs: Needs, UTILISATION, needs_lines, needs_of
options: TEMPERATURE, WorkerOptions, choose_devices, needs_gpu_count, parse_overlap
supervisor: Supervisor, WorkersRestartedError
telemetry: Telemetry
trackers: TrackerSpec, tracking
"""
