// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

// A mistake ends the process with 1, so it fails the test too.
func Example() {
	main()
	// Output:
	// send orders, in the producer's trace: true
	// process ORDERS/billing, in the producer's trace: true
	// dead_letter ORDERS, in the producer's trace: true
	// stormguard.dead_letters exported: true
}
