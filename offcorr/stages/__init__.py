"""The five stages of a correction: ratio, weight, rejection, gate, aggregation."""
