"""Tools before a run: the doctor, which checks a machine; the planner, which forecasts a run; and the demo.

Other rooms import:
demo: DemoScreen, run_demo
doctor.examination: Examination
doctor.findings: Finding, Verdict, as_json, conclusion, show, worst
doctor.machine: check_quickly
plan: LinksFile, TARGETS, forecast, least_bandwidth, plain, plan_of, show
"""
