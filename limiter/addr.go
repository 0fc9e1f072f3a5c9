// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import "net/netip"

// AddrKey returns a key for the client at addr, an IP address and a port as in net.Addr and
// http.Request. The key is the IPv4 address, or the /64 prefix of an IPv6 address. One
// client usually has a /64 to itself, and could use a new address of it for each request.
// The key is empty if addr is not valid; fleets and stores deny an empty key.
func AddrKey(addr string) string {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return ""
	}
	ip := at.Addr().Unmap().WithZone("")
	if ip.Is4() {
		return ip.String()
	}
	p, err := ip.Prefix(64)
	if err != nil {
		return ""
	}
	return p.String()
}
