"""The owner's control over a volunteer: when it pauses or leaves, and the limits on its monthly traffic.

Other rooms import:
conditions: Condition, parse_conditions, parse_hours, parse_until
controls: OwnerRequest, VolunteerStatus, ask, serve_controls, volunteers
facts: GpuState, Observer, is_on_battery, machine_line, read_gpus, read_sensors
monthly: MonthlyTraffic
watch: OwnersWatch, how_to_go_on, watching
"""
