"""Pure statistics on plain numbers: percentiles, medians with spread, intervals, paired differences. No torch."""

from gsm.stats.describe import SpreadSummary, mean, percentile, summary
from gsm.stats.intervals import Interval, PairedDifference, bootstrap_mean_ci, paired_difference
from gsm.stats.slope import Slope, theil_sen

__all__ = [
    "Interval",
    "PairedDifference",
    "Slope",
    "SpreadSummary",
    "bootstrap_mean_ci",
    "mean",
    "paired_difference",
    "percentile",
    "summary",
    "theil_sen",
]
