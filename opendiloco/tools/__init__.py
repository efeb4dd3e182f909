"""What an organiser or a volunteer decides by: checks of a machine, plans of a run, and a demo.

Other rooms import:
demo: DemoScreen, run_demo
doctor.examination: Examination
doctor.findings: Finding, Verdict, as_json, conclusion, show, worst
doctor.machine: check_quickly
plan: LinksFile, TARGETS, forecast, least_bandwidth, plain, plan_of, show
"""
