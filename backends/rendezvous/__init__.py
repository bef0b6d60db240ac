"""Which call is each process in? All must make the same ones, and tell each other short texts about it.

    whereabouts   numbers the calls that this process entered; finds where others are, and makes the error of all
    meeting       waits before a call until all are in it, or finds that this process makes it alone
    agreement     merges texts of all processes: equal facts, the first failure, facts by rank
    alone         runs a model's method that one process calls

They speak through the engine's key-value store (`put_text`, `get_text`). Its keys, where the first 0 says how often the
processes began to count anew, and the last number is the process that writes:

    keras_flow/0/12/3                  what process 3 says in exchange 12
    keras_flow/0/at/3                  the last calls that process 3 entered, once it stays in one
    keras_flow/0/meeting/7/3           process 3 has come to call 7; of process 0: all have
    keras_flow/0/meeting-of/ab12-1/3   process 3 has come to the first meeting of some processes, which ab12 names
    keras_flow/0/told/7/cd34/1/0       what became of what process 0 did for all after call 7, by name and line
    keras_flow/0/verdict-of/all/0      the error that all raise, and the calls that it is of
"""
