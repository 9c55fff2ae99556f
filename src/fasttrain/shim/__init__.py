"""What runs inside every worker: standard library, torch and `fasttrain.spec`, nothing else.

The launcher reaches this package by command line (``python …/shim/__main__.py PLAN …``), never by
import, so that torch stays out of the launcher and typer, rich and yaml stay out of the worker.
"""
