"""Will it fit, and can it get faster? Answered from a config alone, before anything is loaded."""

from gsm.measure.plan.numbers import arch_from_numbers
from gsm.measure.plan.plan import make_plan
from gsm.measure.plan.record import PlanResult
from gsm.measure.plan.render import render_plan
from gsm.measure.plan.weights import PlannedModel, plan_model
from gsm.models.sizes import format_bytes, parse_bytes

__all__ = [
    "PlanResult",
    "PlannedModel",
    "arch_from_numbers",
    "format_bytes",
    "make_plan",
    "parse_bytes",
    "plan_model",
    "render_plan",
]
