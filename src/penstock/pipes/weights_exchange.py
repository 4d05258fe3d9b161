"""Weights between nodes: what asks, and what answers."""

from __future__ import annotations

from penstock.pipes.weights_giver import WeightsGiver as WeightsGiver
from penstock.pipes.weights_taker import WeightsTaker as WeightsTaker
