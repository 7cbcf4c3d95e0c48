"""Steps that are captured once and replayed.

What a capture is, is the device's or the operators'.
"""
