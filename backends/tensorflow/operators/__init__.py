"""TensorFlow's operations, where DTensor has no rule for them or a wrong one.

operations              what a step's operations are asked before they run
graph_operations        operations of a graph, seen as they are made
replicated_operations   flags by which DTensor runs an operation whole
substitutes             operations made of others; by kind: counting, images, linear_algebra, slices, windows
"""
