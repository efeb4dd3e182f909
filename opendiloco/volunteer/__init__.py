"""One machine as a volunteer: its session in a run, its admission to the run, and the run's state on this machine.

Other rooms import:
admission: IssuedTickets, ask_for_signed_heads, enter, read_ticket
identity: default_path, hold_identity, listen, load_identity, lock, usable_path
interrupts: Interrupts, RememberedInterrupt, run_interruptible
local_workload: LocalWorkload, NO_TRAINING, TrainerWorkload, working
states: History, command_line, export_state, fetch_state, find_origin, history_of, make_folder, new_folder,
    newest_state, run_options, state_of, warn_of_other_text, with_text
tracking: Audit, Disagreement, Reached, retrying, state_for, states_until, unless_failed
volunteer: Session, Volunteer, connected, reading
"""
