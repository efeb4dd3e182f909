"""The planner: what a run would come to with given machines and links, before anybody rents them. Needs no torch but to
size a model. docs/planning.md has the assumptions."""
