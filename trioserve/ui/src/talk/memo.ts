// Components that render again only when what they show has changed.

import { Component, h, type ComponentChildren, type ComponentType } from "preact";

/** A component that renders again only if `same` finds a difference in its properties. */
export function memo<P extends object>(
  Inner: ComponentType<P>,
  same: (before: P, after: P) => boolean = shallow,
): ComponentType<P> {
  return class Memo extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      return !same(this.props, next);
    }

    override render(): ComponentChildren {
      return h(Inner as ComponentType<object>, this.props);
    }
  };
}

function shallow(before: object, after: object): boolean {
  const one = Object.entries(before);
  return (
    one.length === Object.keys(after).length &&
    one.every(([name, value]) => value === after[name as keyof typeof after])
  );
}
