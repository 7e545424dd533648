"""What braintrace's users may call and the runtime does not use.

It stands aside, so that a reader of the compiler and the runtime need not pass by it.
"""
