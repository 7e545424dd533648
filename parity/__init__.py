"""braintrace's own tests and examples, run against this library under braintrace's name.

Nothing of braintrace is kept here: ``make parity`` downloads its source distribution.
"""
