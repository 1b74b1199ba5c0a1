"""The error with which a program of the emulator ends if it is wrong."""


class Fault(Exception):
    """On a GPU the program's result would depend on timing, or it would hang, or not compile, or be stopped."""
