/* Loops over floats that every set shares: the compiler vectorizes them with the instructions that the including file
 * has switched on, and as no operation is reordered or fused, the results are the same with all of them. */

static void widen(const uint16_t *bfloat16, int64_t length, float *values)
{
    for (int64_t i = 0; i < length; i++)
        values[i] = float_of((uint32_t)bfloat16[i] << 16);
}

static void subtract(const float *minuend, const float *subtrahend, int64_t length, float *difference)
{
    for (int64_t i = 0; i < length; i++)
        difference[i] = minuend[i] - subtrahend[i];
}

static void add(const float *addend, int64_t length, float *sum)
{
    for (int64_t i = 0; i < length; i++)
        sum[i] += addend[i];
}

static void divide(const float *dividend, float divisor, int64_t length, float *quotient)
{
    for (int64_t i = 0; i < length; i++)
        quotient[i] = dividend[i] / divisor;
}

/* sum += weight * value */
INLINE void accumulate_value(float value, float weight, float *sum)
{
    *sum += weight * value;
}

/* Nesterov's method: v = mu * v + g, theta -= learning_rate * (g + mu * v). */
INLINE void step_value(float gradient, float learning_rate, float mu, float *theta, float *velocity)
{
    float updated = mu * *velocity + gradient;
    *velocity = updated;
    *theta -= learning_rate * (gradient + mu * updated);
}
