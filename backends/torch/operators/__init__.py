"""DTensor's operators, where its own rules are missing, wrong, or cost more than they must.

operations         rules that torch lacks or has wrong
believed_rules     the rules that are right, and are left to DTensor
gathered_whole     every other operator gets whole tensors
in_place           operators that write into a tensor
reading_dtensors   values that a program reads
relayout           changes of layout inside DTensor are plans
attention, embedding, gathering, resizing   handlers for one kind of operator each
"""
