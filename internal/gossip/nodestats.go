// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

// NodeStats are the counts of a [Node] since it began, and its present state.
type NodeStats struct {
	Session Stats

	// Traffic as it is on the wire, membership's packets included. Of membership's streams only the
	// bytes are counted.
	PacketsIn, PacketsOut uint64
	BytesIn, BytesOut     uint64

	Refused     [drops]uint64 // packets, frames and streams that were not taken in, by [Drop]
	SendErrors  uint64        // packets whose write failed
	SendDropped uint64        // packets that made room for newer ones, or had no stream

	Dials, DialErrors uint64
	StreamsIn         int // open streams that others dialed, after a valid first frame
	StreamsOut        int // open streams of packets that this node dialed

	Members   int   // processes that membership knows, this one included
	Discovery error // error of the latest round; nil if it succeeded

	Keys []string // fingerprints of the keys, the primary first; empty without a keyring
}

// Stats returns a snapshot. It asks every section for its marks. After Close it returns the final
// state.
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
