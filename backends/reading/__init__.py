"""Data that several processes read: each reads the rows of a batch that its ranks compute.

process_rows   says which rows of a batch a process reads, and reads arrays so
sources        finds which of Keras's adapters can be read so, and hooks into them
loaders        reads torch's `DataLoader`
py_datasets    reads `keras.utils.PyDataset`
tf_data        reads `tf.data` pipelines
row_order      says which row stands where in an epoch
batch_watch    compares what the processes are fed
"""
