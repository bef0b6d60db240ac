"""What people do with a model beside `fit`: gradients by a tape, control flow; compared with one device."""
