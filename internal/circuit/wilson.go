// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import "math"

// wilsonLow is the lower end of the Wilson score interval for bad failures in n trials at z
// standard deviations. For z = 0 it is the plain ratio, for n = 0 it is 0.
func wilsonLow(bad, n uint64, z float64) float64 {
	if n == 0 {
		return 0
	}
	nf := float64(n)
	p := float64(bad) / nf
	zz := z * z / nf
	low := (p + zz/2 - z*math.Sqrt(p*(1-p)/nf+zz/(4*nf))) / (1 + zz)
	return max(low, 0)
}
