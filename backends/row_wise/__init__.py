"""Does a call treat the rows of a batch one by one? Then a rank may compute its own rows alone.

    row_interaction   asks it of a layer, and of a model with what is inside
    row_operations    asks it of the operations in a functional model's graph, by their signatures
    row_sums          asks whether a loss has a value for each row, and whether a metric adds up rows
    own_code          says whether code is Keras's own, or KerasHub's
    looks             says whether an object is what it was when it was last asked

Row by row is what is known to be: the first of these that holds names the interaction.

    its class is not Keras's                                  own code
    its class is Keras's, and in no table                     unknown
    it keeps a state of the rows (`stateful`)                 state
    it contracts, moves or works along dimension 0            along rows
    a method, or a function that it holds, is the user's      own code, function
    it is quantized by the largest element of all rows        quantization
    a call assigns its state                                  state
    it, or its model, adds a loss over all rows               added loss
    an operation has no signature S(0) -> S(0)                along rows
    a tensor of the graph has no rows, or other ones          shape
"""
