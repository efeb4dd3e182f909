"""DiLoCo: the inner loop of a worker, the outer step of a peer, and both in one process (`reference`).

The inner loop imports torch; learning_rate, moments_file and the outer step, which the peer process uses, do not.
"""
