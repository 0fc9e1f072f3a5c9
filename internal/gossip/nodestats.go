// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

// NodeStats is what a [Node] has done since it began, and how it stands.
type NodeStats struct {
	Session Stats

	// On the wire, membership's packets included, as they travel; streams of
	// membership count in bytes only.
	PacketsIn, PacketsOut uint64
	BytesIn, BytesOut     uint64

	Refused     [drops]uint64 // by [Drop]
	SendErrors  uint64        // packets that the system did not take
	SendDropped uint64        // packets that made room for newer ones, or had no stream

	Dials, DialErrors uint64
	StreamsIn         int // open, that others dialed, and whose first frame was right
	StreamsOut        int // open, with packets

	Members   int   // as membership has it, this process included
	Discovery error // of the latest round; nil if it went well

	Keys []string // fingerprints, the primary first; none without a keyring
}

// Stats returns a snapshot. It asks every section for its marks, and after Close
// is how it stood.
func (n *Node) Stats() NodeStats {
	var st NodeStats
	n.call(func() { st.Session = n.session.Stats(n.clock()) })
	w := &n.t.stats
	st.PacketsIn, st.PacketsOut = w.packetsIn.Load(), w.packetsOut.Load()
	st.BytesIn, st.BytesOut = w.bytesIn.Load(), w.bytesOut.Load()
	for i := range st.Refused {
		st.Refused[i] = w.refused[i].Load()
	}
	st.SendErrors, st.SendDropped = w.sendErrors.Load(), w.sendDropped.Load()
	st.Dials, st.DialErrors = w.dials.Load(), w.dialErrors.Load()
	st.StreamsIn, st.StreamsOut = int(w.streamsIn.Load()), int(w.streamsOut.Load())
	st.Members = len(n.Members())
	if err := n.discoveryErr.Load(); err != nil {
		st.Discovery = *err
	}
	if n.t.seal != nil {
		st.Keys = n.t.seal.ring.Fingerprints()
	}
	return st
}
