"""The present state of a run, as the volunteer's screen, `status`, `runs`, the dashboard and trackers show it.

Other rooms import:
amended: amendment_in_words, changed_values, changes_in_words, outer_steps_in_force, plain_amendment,
    values_in_force
chronicle: Change, Chronicle, KEPT, Record, Signatures
curves: Curves, configuration_of, versions
progress: CHECKING, FINDING, Fragments, JoinView, Lines, OwnFacts, ProgressReader, Screen
run_view: Agreement, PeerRow, RunView, bounded_loss, held_out_lines, holders, is_finished, peers_table, plain_line,
    plain_peer, plain_signed, reach_lines, row_of, signed_lines
"""
