// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import "testing"

func TestAddrKey(t *testing.T) {
	for addr, want := range map[string]string{
		"192.0.2.7:1234": "192.0.2.7", "[::ffff:192.0.2.7]:1": "192.0.2.7",
		"[2001:db8:1:2:3:4:5:6]:80": "2001:db8:1:2::/64", "[fe80::1%eth0]:80": "fe80::/64",
		"@": "", "": "", "pipe": "", "192.0.2.7": "", "host:80": "",
	} {
		if got := AddrKey(addr); got != want {
			t.Errorf("%q: %q, want %q", addr, got, want)
		}
	}
}
