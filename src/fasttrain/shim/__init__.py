"""Runs inside every worker, with the standard library, torch and `fasttrain.model` only.

The launcher starts this package by command line (``python …/shim/__main__.py PLAN …``) and never
imports it: so torch stays out of the launcher, and typer, rich and yaml stay out of the worker.
"""
