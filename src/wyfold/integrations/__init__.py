"""Wyfold under other people's names: `transformers` (patches of its models), `fla` (its operators' names and keywords).

Nothing here is imported by the rest of the library, and importing one of these modules imports no other package.
"""
