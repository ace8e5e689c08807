"""Surrogates for those in a hurry: the demonstration, and benchmarks that audit many classifiers.

Two fifths of the steps and a third of the attacks of the reference recipes, for a quarter of their time. Nothing is
taken on trust for it: an audit measures the evaluator's agreement with the classifier, and says INCONCLUSIVE where the
policy asks for more than a quick one reaches.
"""

from engine.surrogate import EVALUATOR, GUIDE

__all__ = ["QUICK_EVALUATOR", "QUICK_GUIDE"]

QUICK_GUIDE = GUIDE.changed(steps=120, adversarial_share=0.125, adversarial_steps=3, extra_queries=2000)
QUICK_EVALUATOR = EVALUATOR.changed(steps=160, adversarial_share=0.125, adversarial_steps=3, extra_queries=2000)
