"""Carries out rollouts on this machine."""
