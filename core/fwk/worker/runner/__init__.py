"""What a step is made of: the sequences' table, the inputs of a pass, the pass, and steps that are not waited for.

Here belongs what is common to every model; drafts, sampling and captures have folders of their own.
"""
