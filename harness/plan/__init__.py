"""What a sweep is asked: the axes and their values, and the cells of the grid."""
