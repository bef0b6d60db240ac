"""Distributions: from the rules that a user writes to the layouts of a model's variables.

`rules` finds the rule of a path, `shard` what `kf.shard` asked for, `resolve` the layout that the engine can hold,
`distribution` puts them together, `layout_problems` says what is wrong with rules, `models` applies the layouts to a
model that exists already.
"""
